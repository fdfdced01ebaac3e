"""What users wrap models with; emits functional collectives and knows no compiler."""
