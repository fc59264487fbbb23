#!/usr/bin/env python3
"""Builds the archives of the host's kernels from kernels.toml and src/. Arguments: those of the core's ptx/build.py."""
import pathlib, sys

HERE = pathlib.Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE.parents[2] / "ptx"))
import build

build.main(HERE)
