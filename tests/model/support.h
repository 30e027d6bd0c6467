// tests/model/support.h - a model of a fixture, ready to run.
#pragma once

#include "loaded_model.h"

namespace lacuna::model {
using Model = test::LoadedModel;
}  // namespace lacuna::model
