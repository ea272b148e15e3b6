"""Print the JSON Schema of records, with the meaning and unit of each field.

For example: steplab schema --output record.schema.json
"""

from steplab.cli.options import FileOptions


def schema(*, out: FileOptions = FileOptions()) -> None:
    import json

    from steplab.cli.output import chosen_format, emit
    from steplab.records.schema import json_schema

    chosen_format("json", out, allowed=("json",))
    emit(json.dumps(json_schema(), indent=2, ensure_ascii=False), out, "json")
