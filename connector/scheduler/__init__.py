"""The scheduler role: decides what each request loads and what is stored of it."""
