// src/eval/python_text.h - the methods of Python's str that the formats of evaluation tasks are written with, over
// UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lacuna::eval {

// All require valid UTF-8.
/// Without white space at its end; at both ends. White space is what str.isspace() takes for it.
std::string_view strip_end(std::string_view text);
std::string_view strip(std::string_view text);
/// The first character in title case, the others in lower case; characters that become several ones stay.
std::string capitalize(std::string_view text);
/// len(text): code points.
int64_t count_characters(std::string_view text);

}  // namespace lacuna::eval
