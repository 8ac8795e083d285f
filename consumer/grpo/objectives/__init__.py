"""The objectives of the policy loss: [learner.loss] objective names a file, and its function."""
