"""`make docs` rejects a site that loads anything from another server, or whose search needs a server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.docs.prose import ROOT

exceptions = pytest.importorskip("mkdocs.exceptions", reason="needs farandole[docs]")

from docs.hooks import on_post_build, remote_resources  # noqa: E402


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://unpkg.com/iframe-worker/shim"></script>',
        '<link rel="stylesheet" href="//fonts.googleapis.com/css?family=Roboto">',
        '<link rel="preconnect" href="https://fonts.gstatic.com" crossorigin>',
        '<img alt="" srcset="picture.png 1x, https://example.org/picture.png 2x">',
        '<style>@font-face {src: url("https://example.org/font.woff2")}</style>',
    ],
)
def test_a_resource_on_another_server_is_found(element: str) -> None:
    assert len(remote_resources(f"<html><head>{element}</head></html>")) == 1


def test_links_and_local_resources_are_accepted() -> None:
    page = """<a href="https://example.org">x</a><script src="../a.js"></script>
    <style>a {src: url(data:x)}</style>"""
    assert remote_resources(page) == []


def test_styles_from_another_server_are_found() -> None:
    assert remote_resources("@import 'https://example.org/a.css'; a {src: url(b.woff2)}", styles=True) == [
        "https://example.org/a.css"
    ]


def test_a_site_is_checked(tmp_path) -> None:
    config = SimpleNamespace(site_dir=str(tmp_path))
    (tmp_path / "index.html").write_text("<p>text</p>")
    with pytest.raises(exceptions.PluginError, match=r"search/search_index\.js is missing"):
        on_post_build(config)
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.js").write_text("var __index = {}")
    on_post_build(config)
    (tmp_path / "index.html").write_text('<script src="https://example.org/a.js"></script>')
    with pytest.raises(exceptions.PluginError, match=r"index\.html loads https://example\.org/a\.js"):
        on_post_build(config)


def test_the_search_uses_the_script_of_this_site() -> None:
    """Without a polyfill with this name, the plugin `offline` adds a script from another server."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "polyfills: [javascripts/iframe-worker.js]" in settings
    assert "\n  - offline\n" in settings
    assert (ROOT / "docs" / "javascripts" / "iframe-worker.js").is_file()
