"""From a Run to findings: one file per diagnosis, each a pure function of the record."""
