"""Records of problems, from JSON, JSONL, CSV and parquet files."""

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from launch.data.data_files import data_files, message_of
from launch.data.hub import data_file_ending
from launch.data.json_lines import check_bytes, most_bytes, read_lines, read_text, without_nulls
from launch.errors import ConfigError
from models.files import object_of_pairs, optional

Records = Iterator[tuple[dict[str, Any], str]]
# How many times its own bytes a parquet file may hold. Text that all rows repeat is stored once.
_MOST_TIMES = 1000


def read_records(
    option: str,
    paths: str | Path | Sequence[str],
    split: str,
    fields: Collection[str] | None = None,
    also: Collection[str] = (),
) -> Records:
    """Yield (record, place) for each record of files, folders or data sets on the hub. The place is for error messages.

    The format of a file follows from its name: .csv, .parquet, and JSON otherwise (an array of objects, or one object
    per line). Text may be compressed by gzip. Equal rows are equal records in every format: objects within a record
    have no members that are null.
    Raises ConfigError, naming the option or the place, if the records cannot be read.

    split:  split to read if a data set's name gives none.
    fields: fields that are needed, as `text_field` finds them: of parquet files, no other columns are read, unless one
            of these is missing. None: all columns.
    also:   fields to read too where they exist.
    """
    for path in [paths] if isinstance(paths, str | Path) else paths:
        for file in data_files(option, path, split):
            for record, where in _file(option, file, fields, also):
                try:
                    yield {name: without_nulls(value) for name, value in record.items()}, where
                except RecursionError:
                    raise ConfigError(f"{where}: must have fewer levels of nesting") from None


def _file(option: str, path: str | Path, fields: Collection[str] | None, also: Collection[str]) -> Records:
    ending = data_file_ending(str(path))
    if ending.startswith(".csv"):
        return _csv(option, path)
    return _parquet(option, path, fields, also) if ending == ".parquet" else read_lines(option, path)


def _csv(option: str, path: str | Path) -> Records:
    """Yield the rows below the header, by column."""
    csv.field_size_limit(2**31 - 1)  # 131,072 characters by default
    rows = csv.DictReader(io.StringIO(read_text(option, path), newline=""), strict=True, restval="")
    try:
        if (name := _repeated(filter(None, rows.fieldnames or ()))) is not None:
            raise ConfigError(f"{path}:{rows.line_num}: has several columns {name!r}; names must differ")
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row:
                raise ConfigError(f"{where}: has more columns than the header")
            yield row, where
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from None


def _parquet(option: str, path: str | Path, fields: Collection[str] | None, also: Collection[str]) -> Records:
    """Yield the rows of a parquet file, by column. Arguments as for `read_records`."""
    try:
        parquet = optional("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{option} = {path}: {error}") from None
    number = 0
    try:
        # Open the file here: pyarrow takes some paths for addresses.
        with Path(path).open("rb") as file:
            contents = parquet.ParquetFile(file)
            if (name := _repeated(contents.schema_arrow.names)) is not None:
                raise ValueError(f"has several columns {name!r}; names must differ")
            names = _columns(contents, fields, also)
            size, limit = 0, most_bytes(Path(path).stat().st_size, _MOST_TIMES)
            check_bytes(8 * _values_in(contents.metadata, names), limit)
            for batch in contents.iter_batches(batch_size=256, columns=names):
                size += batch.nbytes
                check_bytes(size, limit)
                columns = [_values(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield dict(zip(batch.schema.names, values, strict=True)), f"{path}: row {number}"
    except OSError as error:
        raise ConfigError(f"{option} = {path}: cannot be read: {error.strerror or message_of(error)}") from None
    except Exception as error:  # pyarrow raises many types
        raise ConfigError(f"{option} = {path}: cannot be read: {message_of(error)}") from error


def _columns(contents: Any, fields: Collection[str] | None, also: Collection[str]) -> list[str] | None:
    """Return the columns of a parquet file to read, and fields within columns. None: all."""
    if fields is None:
        return None
    paths = [contents.schema.column(index).path for index in range(len(contents.schema))]
    found = {field for field in (*fields, *also) if any(_is_within(path, field) for path in paths)}
    return sorted(found) if found and found.issuperset(fields) else None


def _values_in(metadata: Any, names: Collection[str] | None) -> int:
    """Return the number of values in the columns of a parquet file, within lists and objects too."""
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    return sum(
        chunk.num_values
        for chunk in chunks
        if names is None or any(_is_within(chunk.path_in_schema, name) for name in names)
    )


def _is_within(path: str, field: str) -> bool:
    return path == field or path.startswith(f"{field}.")


def _repeated(names: Iterable[str]) -> str | None:
    """Return the first name that stands there twice."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _values(column: Any) -> list[Any]:
    """Return the values of a column of pyarrow."""
    values, kind = column.to_pylist(), str(column.type)
    return [_as_written(value, column.type) for value in values] if "float" in kind or "map<" in kind else values


def _as_written(value: Any, kind: Any) -> Any:
    """Return the value as JSON has it: maps as objects, floats of 16 or 32 bits as the shortest decimals that fit them.

    In float64 they have further digits, such as 1234.56005859375 for 1234.56, which no answer of a model equals.
    """
    types = optional("pyarrow").types
    if value is None:
        return None
    if types.is_float16(kind) or types.is_float32(kind):
        return Decimal(str((np.float16 if types.is_float16(kind) else np.float32)(value)))
    if types.is_struct(kind):
        return {field.name: _as_written(value[field.name], field.type) for field in kind}
    if types.is_dictionary(kind):
        return _as_written(value, kind.value_type)
    if types.is_map(kind):
        pairs = [(str(_as_written(key, kind.key_type)), _as_written(item, kind.item_type)) for key, item in value]
        return object_of_pairs(pairs)
    if isinstance(value, list):
        return [_as_written(item, kind.value_type) for item in value]
    return value
