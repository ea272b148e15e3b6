"""What Python and the command line show: `lab` finds the records, `report` says what they say."""
