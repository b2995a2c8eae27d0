"""What is fuzzed, and the seeds that the fuzzer begins with."""
