"""Turns bodies into GenerationRequests. Functions raise ModelNotFound, and InvalidRequest with the parameter's name."""
