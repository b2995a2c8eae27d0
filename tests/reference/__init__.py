"""Plain Python references of native code: what they compute is what the native twins have to compute."""
