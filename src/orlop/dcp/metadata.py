"""DCP's `.metadata` read as data, into a `Catalog`.

Owns the allow-list of what that pickle may name, and the form that DCP's classes have in it. Must not know torch
(`standard` turns a `Catalog` into torch's own classes), nor open files.
"""

from __future__ import annotations

from typing import Any

from orlop.dcp.boxes import Box
from orlop.dcp.catalog import Catalog, Extent, Index, Rules, TensorEntry
from orlop.dcp.dtypes import ITEM_BYTES, OTHER_DTYPES
from orlop.dcp.pickled import Data, Global, read_pickle
from orlop.wording import counted

__all__ = ["ALLOWED", "parse_metadata"]

_DCP = "torch.distributed.checkpoint.metadata."
_ENCODING = f"{_DCP}_MEM_FORMAT_ENCODING"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_PATH_CLASSES = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
ALLOWED = (
    frozenset(f"{_DCP}{name}" for name in _CLASSES)
    # Some Python versions pickle an enum's member as getattr(class, name): a name here, never called.
    | {_STORAGE_INFO, "torch.Size", "torch.serialization._get_layout", "builtins.getattr"}
    | {"collections.OrderedDict"}
    | frozenset(f"torch.{name}" for name in (*ITEM_BYTES, *OTHER_DTYPES))
    | frozenset(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES)
)
_MOST_BYTES = 2 << 30


def parse_metadata(data: bytes, where: str) -> Catalog:
    """Read and validate the content of a `.metadata` file.

    Args:
        data: Its bytes.
        where: Its path, for messages.

    Raises:
        CheckpointUnsafe: It names a global outside the allow-list; nothing ran.
        CheckpointCorrupt: It is damaged, or breaks a rule.
    """
    rules = Rules(where, budget=len(data))
    if len(data) > _MOST_BYTES:
        rules.refuse("it is too large", counted(len(data), "byte"))
    return _Parser(rules).parse(read_pickle(data, ALLOWED, where))


def _kind(value: Any) -> str:
    return value.name if type(value) in (Data, Global) else type(value).__name__


class _Parser:
    """From `Data` to a `Catalog`, by the rules."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def parse(self, root: Any) -> Catalog:
        """The whole."""
        fields = self.fields(root, f"{_DCP}Metadata")
        catalog = Catalog()
        for leaf, entry in self.table(fields.get("state_dict_metadata"), "leaves"):
            if type(leaf) is not str:
                self.rules.refuse("a leaf's key is no text", _kind(leaf))
            catalog.leaves[leaf] = self.entry(leaf, entry)
        for index, info in self.table(fields.get("storage_data"), "storage data"):
            catalog.extents[self.index(index)] = self.extent(info)
        self.rules.disjoint(catalog.extents)
        paths = fields.get("planner_data")
        is_ordered = type(paths) is Data and paths.name == "collections.OrderedDict"
        catalog.paths = self.rules.paths(dict(self.table(paths, "paths")) if is_ordered else paths)
        version = fields.get("version")
        catalog.version = version if type(version) is str else None
        return catalog

    def fields(self, value: Any, name: str) -> dict[str, Any]:
        """The attributes of a dataclass."""
        if type(value) is not Data or value.name != name or value.args != ():
            self.rules.refuse(f"a {name.rpartition('.')[2]} is due", _kind(value))
        state = value.state
        if type(state) is not dict:
            self.rules.refuse(f"a {name.rpartition('.')[2]} is of an unknown form", _kind(state))
        return state

    def table(self, value: Any, what: str) -> list[tuple[Any, Any]]:
        """The pairs of a dict."""
        if type(value) is Data and value.name == "collections.OrderedDict":
            return value.items
        if type(value) is not dict:
            self.rules.refuse(f"its {what} are missing", _kind(value))
        return list(value.items())

    def numbers(self, value: Any, leaf: str) -> tuple[int, ...]:
        """A `torch.Size`, or a plain list of the kind."""
        if type(value) is Data and value.name == "torch.Size" and len(value.args) == 1:
            value = value.args[0]
        return self.rules.numbers(value, leaf)

    def entry(self, leaf: str, value: Any) -> TensorEntry | None:
        """A leaf."""
        if type(value) is Data and value.name == f"{_DCP}BytesStorageMetadata":
            return None
        fields = self.fields(value, f"{_DCP}TensorStorageMetadata")
        dtype, requires_grad = self.properties(fields.get("properties"), leaf)
        chunks = fields.get("chunks")
        if type(chunks) is not list:
            self.rules.refuse(f"the chunks of {leaf!r} are missing", _kind(chunks))
        self.rules.spend(len(chunks))
        boxes = [self.chunk(chunk, leaf) for chunk in chunks]
        return self.rules.tensor(leaf, dtype, self.numbers(fields.get("size"), leaf), boxes, requires_grad)

    def chunk(self, value: Any, leaf: str) -> Box:
        """A box."""
        fields = self.fields(value, f"{_DCP}ChunkStorageMetadata")
        return Box(self.numbers(fields.get("offsets"), leaf), self.numbers(fields.get("sizes"), leaf))

    def properties(self, value: Any, leaf: str) -> tuple[str, bool]:
        """Dtype and requires_grad."""
        if type(value) is Data and value.name == f"{_DCP}TensorProperties" and type(value.state) is tuple:
            match value.state:
                case (
                    Global(name=dtype),
                    Data(name="torch.serialization._get_layout", args=("torch.strided",)),
                    bool(requires_grad),
                    Data() as memory_format,
                    bool(),
                    *strides,
                ) if _is_format(memory_format) and _are_strides(strides):
                    return dtype.removeprefix("torch."), requires_grad
        return self.rules.refuse(f"the properties of {leaf!r} are of an unknown form", _kind(value))

    def index(self, value: Any) -> Index:
        """Which chunk a record holds."""
        fields = self.fields(value, f"{_DCP}MetadataIndex")
        leaf, offset = fields.get("fqn"), fields.get("offset")
        if type(leaf) is not str:
            self.rules.refuse("a record belongs to no leaf", _kind(leaf))
        return leaf, None if offset is None else self.numbers(offset, leaf)

    def extent(self, value: Any) -> Extent:
        """Where a record stands."""
        fields = self.fields(value, _STORAGE_INFO)
        transforms = fields.get("transform_descriptors") or ()
        return self.rules.extent(
            fields.get("relative_path"), fields.get("offset"), fields.get("length"), transforms
        )


def _are_strides(values: list[Any]) -> bool:
    """What torch adds to a tensor's properties from 2.14 on. Not used: a record says its strides itself."""
    return not values or (len(values) == 1 and (values[0] is None or type(values[0]) is tuple))


def _is_format(value: Data) -> bool:
    match value:
        case Data(name=name, args=(int(number),)) if name == _ENCODING:
            return 0 <= number < len(_FORMATS)
        case Data(name="builtins.getattr", args=(Global(name=name), str(member))) if name == _ENCODING:
            return member in _FORMATS
    return False
