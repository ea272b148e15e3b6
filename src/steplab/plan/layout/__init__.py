"""Steps that are spread over ranks: memory, messages and time of each rank, and the choice of a layout.
measurement.step.distribute sets up the same ranks."""
