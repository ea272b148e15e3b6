"""Diagnoses of a Run, one file each; each is a pure function from the record to a finding."""
