"""Play environments of other packages: verifiers, OpenEnv, NeMo Gym, Harbor."""
