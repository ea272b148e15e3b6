from hypothesis import strategies as st

from steplab.specs.model import SIZE_FIELDS

_NUMBERS: dict[str, tuple[int, ...]] = {"model.num_kv_heads": (1, 2), "model.learned_positions": (1024,)}
PARTS: dict[str, tuple[object, ...]] = {
    field.key: tuple(value for value in field.choices if value != field.default) or _NUMBERS[field.key]
    for field in SIZE_FIELDS
    if field.choices or field.key in _NUMBERS
}
GPT_2: dict[str, object] = {
    "model.learned_positions": 1024,
    "model.norm": "layernorm",
    "model.feed_forward": "gelu",
    "model.biases": "all",
    "model.head": "tied",
}
VARIANTS: list[dict[str, object]] = [
    {},
    *({key: value} for key, values in PARTS.items() for value in values),
    GPT_2,
    GPT_2 | {"model.num_kv_heads": 1},
    {"model.num_kv_heads": 2, "model.norm": "layernorm", "model.feed_forward": "gelu", "model.biases": "all"},
    {"model.num_kv_heads": 2, "model.biases": "qkv", "model.head": "tied"},
]


def draw_parts() -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in PARTS.items()})


def named(variant: dict[str, object]) -> str:
    return " ".join(f"{key.removeprefix('model.')}={value}" for key, value in variant.items()) or "default"
