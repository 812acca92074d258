"""What each verb of the command line does: one function a verb."""
