"""What all operators share and what knows none of them: checks, dispatch, layout."""
