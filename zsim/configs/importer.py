"""An importer, as the file of each tool ends with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zsim.configs import documents
from zsim.configs.config_keys import ConfigKeys
from zsim.configs.documents import Config
from zsim.configs.draft import Draft

Parse = Callable[..., Config]
JSON_OR_YAML: Mapping[str, Parse] = {
    ".json": documents.json_config, ".yaml": documents.yaml_config, ".yml": documents.yaml_config
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """An importer: the parsers of its files by suffix, its reader, and what its files look like."""

    parsers: Mapping[str, Parse]
    read: Callable[[ConfigKeys, Draft], None]
    is_config: Callable[[Config], bool]
