"""Prefill and decode of a few tiny layers, greedy and sampled, for compute-sanitizer:

    compute-sanitizer --tool memcheck python docs/results/two_layers.py
    compute-sanitizer --tool racecheck python docs/results/two_layers.py
"""

import sys

import numpy as np

from lily.bench.random_weights import RandomWeights
from lily.engine import Engine
from lily.gpu import Gpu
from lily.options import ExecutionOptions
from lily.plan_report import load_dims
from lily.random_checkpoint import with_layers
from lily.sampling import SamplingParams
from lily.session import Session

config = with_layers(load_dims("lily-tiny")[0], 4)   # three GDN layers and one of attention: a period of the model
engine = Engine(RandomWeights(config, 0), Gpu(sys.argv[1] if len(sys.argv) > 1 else "cuda"), context=512, cache_bytes=0)
ids = np.random.default_rng(0).integers(0, config.vocab_size, 40).tolist()
for sampling in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, top_k=20)):
    session = Session(engine)
    print([t.token for t in session.generate(ids, sampling, 3, (), ExecutionOptions())])
