"""Load and validate a run's configuration from a preset, a TOML file and `key=value` arguments.

The arguments override the file, and the file overrides the preset.

    config = load_config("tiny", ["steps=20", "optimizer.learning_rate=1e-3"])

`presets/default.toml` documents every key.  A configuration file contains only the keys that it changes.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError, model_validator

from farandole._troubleshooting import Documented
from farandole.data.tokenizer import SMALLEST_VOCABULARY
from farandole.plan import (
    ALL_LINEAR,
    Compression,
    LoRA,
    Offloaded,
    Plan,
    PlanError,
    Precision,
    Recompute,
    Rounding,
)

if TYPE_CHECKING:
    from farandole.models.gpt import GPTConfig

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]
ROUTERS = ("balance_loss", "z_loss", "capacity")
"""The keys in [model] that configure the routers of a mixture of experts."""


SYNONYMS = {
    "lr": "optimizer.learning_rate",
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clipping"), "optimizer.clip"),
    **dict.fromkeys(("warmup", "warmup_iters"), "optimizer.warmup_steps"),
    **dict.fromkeys(("batch_size", "global_batch_size", "train_batch_size"), "batch"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "micro_batch"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "micro_batch"),
    **dict.fromkeys(("max_steps", "max_iters", "train_iters", "epochs", "num_train_epochs"), "steps"),
    **dict.fromkeys(("output_dir", "out_dir"), "out"),
    **dict.fromkeys(("n_layer", "num_layers", "num_hidden_layers"), "model.layers"),
    **dict.fromkeys(("n_head", "num_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(("n_embd", "d_model", "dim", "hidden_size"), "model.width"),
    "vocab_size": "model.vocabulary",
    **dict.fromkeys(("block_size", "seq_len", "seq_length", "max_length", "n_positions"), "model.context"),
    **dict.fromkeys(
        ("router_aux_loss_coef", "moe_aux_loss_coeff", "load_balance_loss_weight"), "model.balance_loss"
    ),
    **dict.fromkeys(("router_z_loss_coef", "moe_z_loss_coeff"), "model.z_loss"),
    **dict.fromkeys(("capacity_factor", "moe_expert_capacity_factor"), "model.capacity"),
    **dict.fromkeys(("dataset", "data_path"), "data.path"),
    **dict.fromkeys(("precision", "dtype", "fp16", "bf16", "mixed_precision"), "plan.precision"),
    **dict.fromkeys(("stage", "zero_stage"), "plan.zero"),
    **dict.fromkeys(
        ("data_parallel_shard_degree", "dp_shard", "mics_shard_size", "hybrid"), "plan.data_shard"
    ),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "plan.recompute"),
    **dict.fromkeys(("cpu_offload", "offload_optimizer"), "plan.offload"),
    **dict.fromkeys(("save_steps", "save_interval"), "checkpoint.every"),
    **dict.fromkeys(("eval_steps", "eval_interval"), "evaluate.every"),
    **dict.fromkeys(("logging_steps", "log_interval"), "log.every"),
}
"""This project's keys, by the names that other tools and earlier versions use for them.

The tools are Hugging Face, Megatron-LM, DeepSpeed, torchtitan, Lightning and nanoGPT.
"""


_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "greater than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "pattern": "matching {}",
}


class ConfigError(Documented, ValueError):
    """Raised if the configuration is invalid.  The message has one line per mistake."""

    _section = "configerror"


PIPELINED = 4
"""The default number of micro-batches per pipeline stage.  A rank is then idle for less than 1/5 of a `1f1b` step."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """The sizes of the GPT or BERT model to train, or a Hugging Face folder that sets all sizes except `context`."""

    folder: str = ""
    pretrained: bool = True
    vocabulary: Annotated[int, Field(ge=SMALLEST_VOCABULARY)]
    context: Count
    layers: Count
    heads: Count
    width: Count
    dropout: Annotated[float, Field(ge=0, lt=1)]
    balance_loss: NonNegative = 0.0
    z_loss: NonNegative = 0.0
    capacity: NonNegative = 0.0
    _restored: bool = PrivateAttr(default=False)

    def restored(self, folder: Path) -> ModelSection:
        """Return a copy of this section with `folder` as the model folder.

        Only the configuration and the tokenizer are read from this folder; the weights come from a checkpoint.
        """
        section = self.model_copy(update={"folder": str(folder)})
        section._restored = True
        return section

    @property
    def is_restored(self) -> bool:
        """Return whether the weights come from a checkpoint instead of the model folder."""
        return self._restored

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelSection:
        if self.width % 2:
            raise ValueError(f"width={self.width} is odd; try width={self.width + 1}")
        if self.width % (2 * self.heads):
            fitting = (n for n in range(min(self.heads, self.width // 2), 0, -1) if self.width % (2 * n) == 0)
            near = next(fitting)  # one head is valid for every even width
            raise ValueError(
                f"width={self.width} is not a multiple of 2 * heads = {2 * self.heads}; try heads={near}"
            )
        return self

    def gpt(self) -> GPTConfig:
        """Return the GPT configuration."""
        from farandole.models.gpt import GPTConfig  # import here, because this imports torch

        return GPTConfig(**self.sizes())

    def sizes(self) -> dict[str, Any]:
        """Return a dict that maps the name of each configured size to its value, for a model without a folder."""
        return self.model_dump(exclude={"folder", "pretrained", *ROUTERS})

    def routers(self) -> dict[str, float]:
        """Return the nonzero values of the keys in `ROUTERS`, keyed by name."""
        return {name: value for name in ROUTERS if (value := getattr(self, name))}

    @model_validator(mode="after")
    def _routers_need_experts(self) -> ModelSection:
        if self.routers() and not self.folder:
            name, value = next(iter(self.routers().items()))
            raise ValueError(
                f"{name}={value:g} requires a mixture of experts: use model=FOLDER with a mixture-of-experts model, or "
                f"{name}=0"
            )
        return self


class DataSection(_Section):
    """The training data."""

    path: str
    field: str
    label: str = "label"
    template: str = ""
    validation_share: Share
    cache: str


class PlanSection(_Section):
    """The number of micro-batches, and the fields of `farandole.Plan`, which are validated by `Plan`."""

    data: CountOrZero = 0
    pipeline: Count = 1
    schedule: str = "1f1b"
    micro_batches: CountOrZero = 0
    stage_bytes: CountOrZero = 0
    deferred_batch_norm: bool = False
    tensor: Count = 1
    sequence: bool = False
    context: Count = 1
    ring: CountOrZero = 0
    expert: Count = 1
    zero: int = 0
    data_shard: int | str = "all"
    precision: Literal["auto", Precision] = "auto"
    rounding: Rounding = "nearest"
    recompute: Recompute = "none"
    activation_bytes: CountOrZero = 0
    offload: str = "none"
    offloaded: Offloaded = "optimizer"
    swap: str = "none"
    compression: Compression = "none"
    lora_rank: CountOrZero = 0
    lora_alpha: Positive = 16.0
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lora_targets: str | list[str] = ALL_LINEAR

    @property
    def ranks_per_sample(self) -> int:
        """Return the number of ranks that process the same samples together."""
        return self.pipeline * self.context * self.tensor

    def plan(self, precision: Precision) -> Plan:
        """Return the plan with the given precision.  Raises `PlanError`."""
        values = {name: value for name, value in self.model_dump().items() if not name.startswith("lora_")}
        del values["micro_batches"]  # the caller of the engine divides the batch
        values |= {"precision": precision, "lora": self.lora()}
        for name in ("data", "ring", "stage_bytes", "activation_bytes"):  # TOML has no None
            values[name] = values[name] or None
        return Plan(**values)

    def lora(self) -> LoRA | None:
        """Return the LoRA options, or None if all weights are trained."""
        if not self.lora_rank:
            return None
        return LoRA(self.lora_rank, self.lora_alpha, self.lora_targets, self.lora_dropout)

    @model_validator(mode="after")
    def _is_valid_plan(self) -> PlanSection:
        self.plan("fp32" if self.precision == "auto" else self.precision)
        return self


class ImagesSection(_Section):
    """The image classifier and its preprocessing."""

    network: str = "resnet18"
    size: Annotated[int, Field(ge=32)] = 224
    flip: bool = True


class OptimizerSection(_Section):
    """The options of AdamW, and the learning-rate schedule."""

    learning_rate: Positive
    final_share: Annotated[float, Field(ge=0, le=1)]
    warmup_steps: CountOrZero
    weight_decay: NonNegative
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    clip: Positive


class CheckpointSection(_Section):
    """When to save checkpoints, and how many to keep."""

    every: CountOrZero
    keep: Count


class EvaluateSection(_Section):
    """When to measure the validation loss, and with how many samples."""

    every: CountOrZero
    samples: Count


class LogSection(_Section):
    """The options for the run's output and metrics."""

    every: Count
    tensorboard: bool
    wandb: bool = False
    diagnose: bool = False


class SampleSection(_Section):
    """The text to generate during and after training."""

    every: CountOrZero = 0
    prompt: str
    tokens: CountOrZero
    temperature: NonNegative
    top_k: CountOrZero


class TrainConfig(_Section):
    """The configuration of `farandole train`."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    out: str
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    steps: Count
    batch: Count
    micro_batch: CountOrZero
    task: str = "text"
    weights: str = ""
    profile: bool = False
    model: ModelSection
    images: ImagesSection = ImagesSection()
    data: DataSection
    plan: PlanSection
    optimizer: OptimizerSection
    checkpoint: CheckpointSection
    evaluate: EvaluateSection
    log: LogSection
    sample: SampleSection
    options: dict[str, bool | int | float | str | list[JsonValue]] = {}

    @model_validator(mode="after")
    def _folder_suits_task(self) -> TrainConfig:
        if self.model.folder and self.task not in ("text", "sft", "classify") and ":" not in self.task:
            raise ValueError(
                f"task={self.task!r} does not support a model folder; use task=text, sft or classify"
            )
        return self

    @model_validator(mode="after")
    def _diagnose_requires_fp16(self) -> TrainConfig:
        if self.log.diagnose and self.plan.precision != "fp16":
            raise ValueError(
                f"log.diagnose=true requires plan.precision=fp16, got {self.plan.precision!r}; "
                f"try plan.precision=fp16 or log.diagnose=false"
            )
        return self

    def micro_batches(self, ranks: int) -> tuple[int, int]:
        """Return the number of micro-batches per rank and step, and the number of samples in each micro-batch.

        Raises:
            ConfigError: if the batch cannot be divided equally, or both `micro_batch` and `plan.micro_batches` are set.
        """
        together = self.plan.ranks_per_sample
        replicas = max(1, ranks // together)
        of = "ranks" if together == 1 else f"groups of {together} ranks"
        if self.batch % replicas:
            lower = self.batch // replicas * replicas
            near = [str(n) for n in (lower, lower + replicas) if n]
            raise ConfigError(
                f"batch={self.batch} is not divisible by {replicas} {of}; try batch={' or '.join(near)}"
            )
        share = self.batch // replicas
        count = self.plan.micro_batches
        if self.plan.pipeline > 1 and not count and not self.micro_batch:
            most = min(PIPELINED * self.plan.pipeline, share)
            count = max(n for n in range(1, most + 1) if share % n == 0)
        if count:
            if self.micro_batch:
                raise ConfigError(
                    f"plan.micro_batches={count} and micro_batch={self.micro_batch} are mutually exclusive; use "
                    "micro_batch=0 or plan.micro_batches=0"
                )
            if share % count:
                near_count = max(n for n in range(1, min(count, share) + 1) if share % n == 0)
                raise ConfigError(
                    f"plan.micro_batches={count} must divide {share}, the number of samples per step on each of {replicas} {of}; "
                    f"try plan.micro_batches={near_count}"
                )
            return count, share // count
        size = self.micro_batch or share
        if share % size:
            near_size = max(n for n in range(1, min(size, share) + 1) if share % n == 0)
            raise ConfigError(
                f"micro_batch={size} must divide {share}, the number of samples per step on each of {replicas} {of}; "
                f"try micro_batch={near_size}"
            )
        return share // size, size

    def flat(self) -> dict[str, Any]:
        """Return a dict that maps full keys, such as `model.width`, to their values."""
        values: dict[str, Any] = {}
        for key, value in self.model_dump().items():
            inner = value.items() if isinstance(value, dict) else None
            values |= {key: value} if inner is None else {f"{key}.{name}": item for name, item in inner}
        return values

    def to_toml(self) -> str:
        """Return this configuration as TOML, in the format that `load_config` reads."""
        return to_toml(self.flat())


def to_toml(values: Mapping[str, Any]) -> str:
    """Convert values with full keys, such as `model.width`, to TOML with sections."""
    top_level = {key: value for key, value in values.items() if "." not in key}
    lines = _toml_items(top_level)
    for section, keys in itertools.groupby(
        (key for key in values if key not in top_level), lambda key: key.partition(".")[0]
    ):
        lines += ["", f"[{section}]", *_toml_items({key.partition(".")[2]: values[key] for key in keys})]
    return "\n".join(lines).lstrip() + "\n"


def _toml_items(table: Mapping[str, Any]) -> list[str]:
    return [f"{_toml_key(name)} = {_toml_value(value)}" for name, value in table.items()]


def _toml_key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    # TOML differs from JSON in infinite numbers and in characters outside the BMP
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(_toml_items(value))}}}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def presets() -> dict[str, str]:
    """Return a dict that maps the name of each preset to its TOML text."""
    folder = resources.files("farandole.train") / "presets"
    return {
        Path(file.name).stem: file.read_text()
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml")
    }


def load_config(source: str | None = None, overrides: list[str] | None = None) -> TrainConfig:
    """Load a preset or a TOML file, and apply `key=value` overrides.

    A file extends the preset that its key `preset` names, or preset `default` if this key is missing.

    Raises:
        ConfigError: if the configuration is invalid.
    """
    return _overridden(_with_preset(_read(source or "default")), overrides or [])


def with_overrides(config: TrainConfig, overrides: list[str]) -> TrainConfig:
    """Return `config` with `key=value` overrides applied.  Raises `ConfigError`."""
    return _overridden(config.model_dump(), overrides)


def _overridden(values: dict[str, Any], overrides: list[str]) -> TrainConfig:
    for override in overrides:
        _apply(values, override)
    config = parse_config(values)
    sizes = [f"model.{name}" for name in config.model.sizes() if name != "context"]
    named = [key for key in (o.partition("=")[0].strip() for o in overrides) if key in sizes]
    if config.model.folder and named:
        raise ConfigError(
            f"{named[0]} cannot be set with model={config.model.folder}, because the folder determines the model's sizes; omit this key"
        )
    return config


def parse_config(values: dict[str, Any]) -> TrainConfig:
    """Create a configuration from values with the structure of a TOML file.  Raises `ConfigError`."""
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None


def saved_config(values: dict[str, Any]) -> TrainConfig:
    """Create a configuration from a run's values, possibly saved by an earlier version.  Raises `ConfigError`."""
    return parse_config(_translated(values))


def plan_config_error(error: PlanError) -> ConfigError:
    """Convert a plan error to a `ConfigError` with the full name of the key."""
    key = str(error).partition("=")[0]
    return ConfigError(f"plan.{error}" if key in PlanSection.model_fields else f"plan: {error}")


def _translated(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`, with keys from earlier versions renamed to the current keys."""
    values = dict(values)
    moved = values.pop("parallel", {})
    if "precision" in values:
        moved = {**moved, "precision": values.pop("precision")}
    plan = {**moved, **values.get("plan", {})}
    if plan.pop("hybrid", False):
        plan["data_shard"] = "host"
    return values | {"plan": plan}


def known_keys() -> list[str]:
    """Return the full names of all keys: `steps`, `model.width`, ..."""
    keys = []
    for name, field in TrainConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, _Section):
            keys += [f"{name}.{inner}" for inner in section.model_fields]
        elif name != "options":  # custom tasks define the keys in [options]
            keys.append(name)
    return keys


def _read(source: str) -> dict[str, Any]:
    available = presets()
    if source in available:
        return {"preset": source}
    path = Path(source).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(source, available, n=1)
        hint = f"did you mean {near[0]}?" if near else f"presets are {', '.join(available)}"
        raise ConfigError(f"{source} is not a preset or file; {hint}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        written_by_a_run = path.name == "config.toml" and (path.parent / "checkpoints").is_dir()
        return _translated(values) if written_by_a_run else values
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "" if path.suffix == ".toml" else f"; to train on this text use data.path={source}"
        raise ConfigError(f"{source} is not valid TOML: {error}{hint}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}; check the file") from None


def _with_preset(values: dict[str, Any]) -> dict[str, Any]:
    available = presets()
    name = values.pop("preset", "default")
    if name not in available:
        raise ConfigError(f"unknown preset={name!r}; presets are {', '.join(available)}")
    merged = tomllib.loads(available["default"])
    for layer in (tomllib.loads(available[name]), values):
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] |= value
            else:
                merged[key] = value
    return merged


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    key = "model.folder" if key == "model" else key
    if not equals or not key:
        raise ConfigError(f"{override!r} is not an override: expected key=value, such as steps=100")
    section, dot, name = key.rpartition(".")
    if key not in known_keys() and not (section == "options" and name):
        raise ConfigError(unknown_key(key))
    (values.setdefault(section, {}) if dot else values)[name] = _value(text.strip())


def _value(text: str) -> Any:
    """Parse a TOML value, or return `text` as a string, so that paths need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def unknown_key(key: str) -> str:
    """Return the error message for an unknown key, with a suggestion."""
    known = known_keys()
    section, _, name = key.rpartition(".")
    same = [other for other in known if other.endswith(f".{name}")]
    if f"plan.{name}" in known and (section == "parallel" or key == "precision"):  # used in earlier versions
        same = [f"plan.{name}"]
    if current := same[0] if len(same) == 1 else SYNONYMS.get(name):
        return f"unknown key {key}; did you mean {current}?"
    for folder in (key, section):
        siblings = {other.rpartition(".")[2]: other for other in known if other.startswith(f"{folder}.")}
        if siblings:
            near = difflib.get_close_matches(name, siblings, n=1)
            hint = f"did you mean {siblings[near[0]]}?" if near else f"{folder} has {', '.join(siblings)}"
            return f"unknown key {key}; {hint}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:
        names = {other.rpartition(".")[2]: other for other in known}
        near = [names[other] for other in difflib.get_close_matches(name, names, n=1)]
    hint = f"did you mean {near[0]}?" if near else "to list all keys, run farandole config keys"
    return f"unknown key {key}; {hint}"


def key_type(name: str) -> str:
    """Return a description of the type and the limits of key `name`, such as "integer, at least 1"."""
    schema = _schema()
    section, _, last = name.partition(".")
    found = schema["properties"][section]
    if last and section == "options":  # custom tasks define the keys in [options]
        found = found["additionalProperties"]
    elif last:
        found = schema["$defs"][found["$ref"].rpartition("/")[2]]["properties"][last]
    if "$ref" in found or found.get("type") == "object":
        return "section with keys"
    if "enum" in found:
        return "one of " + ", ".join(found["enum"])
    types = " or ".join(option["type"] for option in found.get("anyOf", [found]))
    limits = [words.format(found[limit]) for limit, words in _LIMITS.items() if limit in found]
    limits += ["with dates as strings"] if section == "options" else []  # JSON has no dates
    return ", ".join([types, *limits])


@functools.cache
def _schema() -> dict[str, Any]:
    return TrainConfig.model_json_schema()


def _explain(error: ValidationError) -> Iterator[str]:
    explained = set()
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield unknown_key(key)
        elif problem["type"] == "value_error":
            cause = problem["ctx"]["error"]
            yield str(plan_config_error(cause)) if isinstance(cause, PlanError) else f"{key}: {cause}"
        else:
            # the location of a problem may also name one of several types, or the index of an item
            key = ".".join(str(part) for part in problem["loc"][:2])
            key = key if key in known_keys() or key.startswith("options.") else key.partition(".")[0]
            if key not in explained:
                explained.add(key)
                yield _expected(key, problem)


def _expected(key: str, problem: Any) -> str:
    """Return the error message for a value that is missing, has the wrong type or is out of range."""
    what = key_type(key)
    if not what.startswith("one of "):
        what = f"{'an' if what[0] in 'aeiou' else 'a'} {what}"
    if problem["type"] == "finite_number":
        what = what.replace("number", "finite number")
    if problem["type"] == "missing":
        return f"{key} is missing: expected {what}"
    return f"{key}={problem['input']!r}: expected {what}"
