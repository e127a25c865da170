"""What a configuration file may say, a module for each part; `sidecar/config.py` joins them."""
