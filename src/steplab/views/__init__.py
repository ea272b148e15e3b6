"""Views for Python and the command line: `lab` finds records, `report` describes them."""
