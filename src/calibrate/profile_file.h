// src/calibrate/profile_file.h - what files of profiles have in common.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"
#include "io/json.h"

namespace lacuna::calibrate {

/// `text` in lower case, anything but letters and digits as single dashes.
std::string file_name_of(std::string_view text);
/// A number that must be there.
double need_number(const io::JsonObject& object, const char* key, const std::string& where);
/// Throws Error unless it is a time in ms: above 0, below 1e9.
void check_ms(double ms, const std::string& where);
/// nullopt: there is no such file. Throws Error when it cannot be read or is larger than any profile.
std::optional<std::string> read_profile_file(const std::string& path);
/// Makes the folder and replaces the file at once.
void write_profile_file(const std::string& path, const std::string& text);

/// Throws Error unless what the profile is of is what is here.
template <class Value>
void check_same(const std::string& path, const char* what, const Value& found, const Value& here) {
  if (found != here) throw Error("{}: is of {} \"{}\", this is \"{}\"", path, what, found, here);
}

}  // namespace lacuna::calibrate
