"""Steps that are spread over ranks: what each rank holds, what it sends, how long a step takes, and which layout to
take. The ranks run what measurement.step.laying_out and measurement.step.distribute set up.
"""
