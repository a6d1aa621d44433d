"""Reading and writing the files people hand to Penstock: clear errors in, atomic replacement out."""

from __future__ import annotations

from penstock.files.explaining import describe_validation_error, problem_lines, short_repr
from penstock.files.json_files import parsed_json, read_json
from penstock.files.outputs import outputs_apart, reserve_output
from penstock.files.places import check_folder, check_new_folder, check_writable
from penstock.files.reading import MAX_TEXT_BYTES, decoded, read_text, readable_bytes, readable_file
from penstock.files.tables import csv_rows, csv_text
from penstock.files.writing import write_bytes, write_json, write_text, written_together
from penstock.files.yaml_files import parsed_yaml, read_yaml, yaml_text

__all__ = [
    "MAX_TEXT_BYTES", "check_folder", "check_new_folder", "check_writable", "csv_rows", "csv_text", "decoded",
    "describe_validation_error", "outputs_apart", "parsed_json", "parsed_yaml", "problem_lines", "read_json", "read_text", "read_yaml",
    "readable_bytes", "readable_file", "reserve_output", "short_repr", "write_bytes", "write_json", "write_text", "written_together",
    "yaml_text",
]  # fmt: skip
