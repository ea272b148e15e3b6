"""Print the JSON Schema of records, as `show --format json` and `export` write them, with the meaning of each field.

For example: steplab schema --output record.schema.json
"""

from steplab.cli.options import FileOptions


def schema(*, out: FileOptions = FileOptions()) -> None:
    import json

    from steplab.cli.output import chosen_format, emit
    from steplab.records.schema import json_schema

    chosen_format("json", out, allowed=("json",))
    emit(json.dumps(json_schema(), indent=2, ensure_ascii=False), out, "json")
