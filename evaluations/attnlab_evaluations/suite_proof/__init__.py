"""What proves the conformance suite: mutants, which a check must fail, and correct variants, which no check may fail."""
