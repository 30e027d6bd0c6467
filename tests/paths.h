// tests/paths.h - where the sources and the program lie: set in one file, so that the others compile to the same
// objects in every clone.
#pragma once

namespace lacuna::test {

extern const char* const kSourceDir;
extern const char* const kProgram;  // lacuna

}  // namespace lacuna::test
