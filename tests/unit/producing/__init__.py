"""The producing side without Redis: data sets, sampler, judges, agent loops."""
