"""Laboratory benchmarks, one module each: `arguments(parser)` adds options, `run(args)` prints figures."""
