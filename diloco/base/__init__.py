"""Values and small tools that know nothing of the rest: types, errors, clock, hashing, failpoints."""
