"""Shows records to Python and the command line: `lab` finds them, `report` describes them."""
