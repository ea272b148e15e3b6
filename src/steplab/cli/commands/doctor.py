"""Describe this machine and measure its peaks, which MFU uses if no data sheet is known.

For example: steplab doctor --device cpu
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import GivenFields, PageOptions, timeout_help
from steplab.specs.benchmark import DOCTOR


class DoctorOptions(GivenFields, others=DOCTOR.own):
    """Options of `doctor`, such as the device."""


def doctor(
    *,
    asked: DoctorOptions = DoctorOptions(),
    timeout: Annotated[str, Parameter(help=timeout_help("measuring"))] = "10min",
    out: PageOptions = PageOptions(),
) -> None:
    from steplab.cli.output import chosen_format, emit_document
    from steplab.cli.progress import ProgressLine
    from steplab.lab.machine import doctor as examine
    from steplab.report.ceilings import REPORT
    from steplab.units import parse_duration

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        timeout_s = parse_duration(timeout)
        ceilings = examine(**asked.options(), store=out.store, timeout_s=timeout_s, on_progress=line.within)
    emit_document(REPORT.document(ceilings), chosen, out, stored=ceilings.id)
