#include "paths.h"

namespace lacuna::test {

const char* const kSourceDir = LACUNA_SOURCE_DIR;
const char* const kProgram = LACUNA_BINARY;

}  // namespace lacuna::test
