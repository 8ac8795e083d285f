"""Call functions of users, and code that models wrote, so that they harm nothing but themselves."""
