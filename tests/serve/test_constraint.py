"""Output constrained by schemas, regular expressions and grammars: every complete output is valid."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from farandole.data.tokenizer import train_tokenizer
from farandole.serve.constraint import Grammars
from farandole.serve.llm import LLM
from farandole.serve.request import RequestError, Sampling
from tests.forking import CONTEXT
from tests.serve.server import NAME, serving, write_folder

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "blue", 3, None]}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}]},
    {
        "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}}, "required": ["left"]}, "leaf": {"const": "leaf"}},
        "$ref": "#/$defs/tree",
    },
]  # fmt: skip
REGEXES = ["(red|blue) cat", "[0-9]{4}-[0-9]{2}", "a+b?", "[あ-ん]{2}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_running=8)


def test_every_complete_output_is_valid(llm: LLM) -> None:
    samplings = [
        Sampling(max_tokens=300, temperature=temperature, seed=seed, **constraint)
        for seed, temperature in enumerate((0.0, 0.7, 1.0, 2.0))
        for constraint in (
            *({"json_schema": schema} for schema in SCHEMAS),
            *({"regex": regex} for regex in REGEXES),
            {"grammar": 'start: "yes" | "no" " " /[a-c]{3}/'},
            {},
        )
    ]
    results = list(llm.stream(["say"] * len(samplings), samplings))
    complete = 0
    for sampling, result in zip(samplings, results, strict=True):
        if not sampling.is_constrained or result.completions[0].finish_reason != "stop":
            continue
        complete += 1
        if sampling.json_schema is not None:
            jsonschema.validate(json.loads(result.text), sampling.json_schema)
        elif sampling.regex is not None:
            assert re.fullmatch(sampling.regex, result.text)
        else:
            assert re.fullmatch("yes|no [a-c]{3}", result.text)
    assert complete > len(samplings) * 0.7
    # a constraint does not change the other sequences
    free = [sampling for sampling in samplings if not sampling.is_constrained]
    alone = list(llm.stream(["say"] * len(free), free))
    together = [result for result, sampling in zip(results, samplings, strict=True) if sampling in free]
    assert [each.completions[0].tokens for each in alone] == [each.completions[0].tokens for each in together]


def test_the_best_allowed_token_is_selected(llm: LLM) -> None:
    """Compare with a search over all tokens: the most likely token that keeps the text a prefix of a match."""
    result = llm.generate(["say"], max_tokens=20, temperature=0, regex="[a-z ]{12}", logprobs=20)[0]
    text = result.text
    assert re.fullmatch("[a-z ]{12}", text)
    before = ""
    for logprob in result.completions[0].logprobs:
        token = llm.tokenizer.decode([logprob.token])
        for other, value in logprob.top:
            found = before + llm.tokenizer.decode([other], skip_special_tokens=False)
            if value > logprob.logprob:
                assert not re.fullmatch("[a-z ]{0,12}", found), (token, found)
        before += token


@pytest.mark.parametrize(
    ("parameters", "field", "text"),
    [
        ({"regex": "[a-z"}, "regex", "unclosed"),
        ({"json_schema": {"type": "objectx"}}, "json_schema", "objectx"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema", "uniqueItems"),
        ({"grammar": "start: x"}, "grammar", "x"),
        ({"grammar": "start: start"}, "grammar", "expected a grammar that some text matches"),
        ({"json_schema": {"$ref": "#"}}, "json_schema", "expected a json_schema that some text matches"),
        ({"regex": r"[^\s\S]"}, "regex", "expected a regex that some text matches"),
        ({"regex": r"a[^\s\S]"}, "regex", "expected a regex that some text matches"),
        ({"grammar": 'start: "a"' + " " * (96 << 10)}, "grammar", "expected at most 96 KiB, got 96.0 KiB"),
        ({"json_schema": {"const": "a" * (300 << 10)}}, "json_schema", "expected at most 96 KiB, got 300"),
        ({"regex": "a", "grammar": 'start: "a"'}, "grammar", "regex"),
        ({"regex": "a", "min_tokens": 1}, "min_tokens", "regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "regex"),
    ],
)
def test_invalid_constraints(llm: LLM, parameters: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as found:
        llm.generate(["say"], **parameters)
    assert found.value.field.endswith(field)


def serve_chain(kind: str, depth: int) -> None:
    tokenizer = train_tokenizer(["hello world"], 270)
    grammars = Grammars(tokenizer, 270, [0])
    names = [f"{kind}{number}" for number in range(depth)]
    if kind == "ref":
        following = {
            name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise([*names, "end"])
        }
        sampling = Sampling(json_schema={"$defs": {**following, "end": {"const": 1}}, "$ref": "#/$defs/ref0"})
    else:
        rules = [f"{name}: {after}" for name, after in itertools.pairwise(names)]
        sampling = Sampling(grammar="\n".join([f"start: {names[0]}", *rules, f'{names[-1]}: "1"']))
    found = []

    def use() -> None:
        matcher = grammars.matcher(sampling)
        matcher.add(tokenizer.encode("1").ids[0])
        grammars.mask(torch.zeros(1, 270), [0], [matcher])
        found.append(matcher.error)

    thread = threading.Thread(target=use)  # as in the server
    thread.start()
    thread.join()
    assert found == [""]


@pytest.mark.parametrize(("kind", "depth"), [("ref", 2600), ("rule", 4800), ("TERM", 4800)])
def test_long_chains_of_rules_do_not_end_the_process(kind: str, depth: int) -> None:
    process = CONTEXT.Process(target=serve_chain, args=(kind, depth))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


def test_the_size_of_a_stack_is_changed_for_one_thread(llm: LLM) -> None:
    before = threading.stack_size()
    llm.engine.check([5], Sampling(regex="on one stack"))
    assert threading.stack_size() == before


def test_a_tokenizer_that_llguidance_does_not_support() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="b"))
    grammars = Grammars(tokenizer, 3, [2])
    for _ in range(2):
        with pytest.raises(
            RequestError, match=r"^regex: .* this model's tokenizer \(.*decoder.*\); omit regex"
        ):
            grammars.matcher(Sampling(regex="a"))


@pytest.mark.parametrize("constraint", [{"regex": ""}, {"grammar": 'start: ""'}])
def test_a_constraint_can_require_the_empty_text(llm: LLM, constraint: dict[str, str]) -> None:
    result = llm.generate(["say"], max_tokens=5, **constraint)[0]
    assert (result.text, result.completions[0].finish_reason) == ("", "stop")


def test_end_tokens_outside_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 32000]}')
    llm = LLM(tmp_path)
    assert llm.engine.end_tokens == {1}
    samplings = [Sampling(max_tokens=5, min_tokens=2), Sampling(max_tokens=5, regex="[a-c]{2}")]
    found = [each.completions[0] for each in llm.stream(["say", "say"], samplings)]
    assert len(found[0].tokens) >= 2
    assert re.fullmatch("[a-c]{2}", found[1].text)


def test_response_format(folder: Path) -> None:
    with (
        serving(folder) as (address, _),
        openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "say red cat"}]
        options: dict[str, Any] = {"model": NAME, "messages": messages, "seed": 3, "max_tokens": 400}
        schema = SCHEMAS[0]
        form: Any = {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema, "strict": True},
        }
        whole = client.chat.completions.create(response_format=form, **options).choices[0]
        assert whole.finish_reason == "stop"
        jsonschema.validate(json.loads(whole.message.content or ""), schema)
        parts = client.chat.completions.create(response_format=form, stream=True, **options)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content
        bias = {str(token): -100 for token in range(300) if token not in range(2, 97)}
        found = client.chat.completions.create(
            response_format={"type": "json_object"}, logit_bias=bias, **{**options, "max_tokens": 1000}
        ).choices[0]
        assert (found.message.content or "").startswith("{")
        if found.finish_reason == "stop":
            assert isinstance(json.loads(found.message.content or ""), dict)
        text = client.completions.create(
            model=NAME, prompt="say", extra_body={"regex": "(red|blue){2}"}, max_tokens=50
        )
        assert re.fullmatch("(red|blue){2}", text.choices[0].text)
        for change, name in (
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            ({"response_format": {"type": "xml"}}, "response_format"),
            ({"response_format": {**form, "type": "text"}}, "response_format"),
            ({"extra_body": {"regex": "("}}, "regex"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**options, **change)
            assert str(refused.value.param).startswith(name)
