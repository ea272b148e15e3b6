"""Help is a docstring without the line breaks of the source."""

from steplab.cli.help_text import unwrapped


def test_lines_that_the_source_wrapped_are_joined_and_those_of_examples_stay() -> None:
    full = " ".join(["word"] * 22) + " short"
    assert len(full) == 115
    text = f"""Summary.

    {full}
    and its end.

    For example: one
    On GPUs: two
    """
    assert unwrapped(text) == f"Summary.\n\n{full} and its end.\n\nFor example: one\nOn GPUs: two"
    assert unwrapped(None) == ""
