"""The paper's experiments: recipes, their runs and records, and the verdicts on its claims."""
