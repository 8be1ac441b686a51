from tether.core.errors import require

require("sqlmodel", "a preference store", "preferences")
