"""Execution plans: the model graph turned into dispatches for the prefill and the decode phase."""
