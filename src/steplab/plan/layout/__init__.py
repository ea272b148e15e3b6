"""Steps that are spread over ranks: memory, messages and time of each rank, and the choice of a layout.
measurement.step.laying_out and measurement.step.distribute set up the same ranks."""
