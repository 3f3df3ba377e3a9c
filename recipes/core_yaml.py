"""YAML without its traps: `no` is text, 1e-4 is a number, 1:30 is no number of seconds, and a key given twice is an error."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml


class Core(yaml.SafeLoader):
    """YAML 1.2's core: `no` is text, 1e-4 is a number, and a key given twice is an error."""

    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float", ":int", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float)):
                raise yaml.constructor.ConstructorError(None, None, f"a key must be plain text, found {key!r}", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


Core.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
Core.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
Core.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)|(?:\.[0-9]+|[0-9]+\.[0-9]*)|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)
