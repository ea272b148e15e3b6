"""From a Run to findings: one file a diagnosis, each a pure function of the record."""
