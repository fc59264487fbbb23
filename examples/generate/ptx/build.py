#!/usr/bin/env python3
"""Compiles every *.cu here to the committed *.ptx beside it, as ../../../ptx/build.py does with the core's kernels.

  build.py [STEM..]           write the .ptx files (all, or those named)
  build.py --check [STEM..]   write nothing; fail unless they are what the sources give and ptxas assembles them without spills
"""
import pathlib, sys

HERE = pathlib.Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE.parents[2] / "ptx"))
import build

build.main(HERE)
