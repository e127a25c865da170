"""What the configuration file may say, a module for each section."""
