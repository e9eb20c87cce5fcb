"""The wire types as schemas of an OpenAPI document."""

from typing import Any

import msgspec

_REFERENCE = "#/$defs/{name}"


def schema_of(kind: type) -> dict[str, Any]:
    """JSON schema of a type, complete in itself: the document has no place for ours to refer to."""
    (schema,), definitions = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    known = {_REFERENCE.format(name=name): definition for name, definition in definitions.items()}
    resolved: dict[str, Any] = _resolved(schema, known)
    return resolved


def body_of(kind: type) -> dict[str, Any]:
    """Description of a request's body."""
    return {"required": True, "content": {"application/json": {"schema": schema_of(kind)}}}


def json_of(kind: type, description: str | None = None) -> dict[str, Any]:
    """Description of an answer."""
    content = {"content": {"application/json": {"schema": schema_of(kind)}}}
    return content if description is None else {"description": description, **content}


def _resolved(schema: Any, known: dict[str, Any]) -> Any:
    match schema:
        case {"$ref": str(reference), **rest}:
            return {**_resolved(known[reference], known), **_resolved(rest, known)}
        case dict():
            return {key: _resolved(value, known) for key, value in schema.items()}
        case list():
            return [_resolved(value, known) for value in schema]
        case _:
            return schema
