"""What bigbatch costs, against the limit and against what else there is.

python -m benchmarks --help
"""
