"""What every kernel folder needs: choice of implementation, bit masks, tolerances, interpreter, timing."""
