// src/io/documents.h - texts to calibrate with: plain text, or JSON lines with a document a line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lacuna::io {

/// A file whose first character is '{' is taken as JSON lines: of each object the string values of `keys`, joined in
/// that order; empty keys: "text" where the first object has it, else "prefix" and "gold_completion". Empty lines are
/// skipped. Anything else is one document. Throws Error naming the line and the keys that were found.
std::vector<std::string> split_documents(std::string_view text, const std::vector<std::string>& keys,
                                         const std::string& where);

/// Documents in one text, a blank line between two.
std::string join_documents(const std::vector<std::string>& documents);

}  // namespace lacuna::io
