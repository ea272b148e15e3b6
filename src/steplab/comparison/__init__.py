"""Two records -> how they differ, figure by figure: pure functions from stored samples to records.comparison."""
