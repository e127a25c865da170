"""Object stores: one tier over many clients, with retries, deadlines and limits around it."""
