# LibTorch, which the compressor needs (src/solver, src/compress) and the runtime does not: sets LACUNA_COMPRESS_FOUND and makes lacuna_torch.
# LACUNA_TORCH names a folder with include/ and lib/, such as the torch folder of an installed PyTorch; otherwise find_package looks (Debian's
# libtorch-dev, or a libtorch in CMAKE_PREFIX_PATH).
set(LACUNA_COMPRESS_FOUND OFF)
string(TOUPPER "${LACUNA_COMPRESS}" compress_wanted)
if(NOT compress_wanted MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LACUNA_COMPRESS is '${LACUNA_COMPRESS}'; it must be AUTO, ON or OFF")
endif()
if(compress_wanted STREQUAL "AUTO" AND (LACUNA_SANITIZE OR LACUNA_COVERAGE OR LACUNA_FUZZ))  # builds for the runtime's code
  set(compress_wanted OFF)
endif()
if(NOT compress_wanted STREQUAL "OFF")
  add_library(lacuna_torch INTERFACE)
  if(LACUNA_TORCH)
    if(NOT EXISTS ${LACUNA_TORCH}/include/ATen/ATen.h)
      message(FATAL_ERROR "LACUNA_TORCH is '${LACUNA_TORCH}', but ${LACUNA_TORCH}/include/ATen/ATen.h is not there")
    endif()
    # A PyTorch brings headers of an fmt of its own, whose library it does not: ours comes first, in a folder without anything else.
    get_target_property(fmt_headers fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)
    find_path(fmt_headers_of_core fmt/core.h PATHS ${fmt_headers} NO_DEFAULT_PATH REQUIRED)
    file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/fmt_first)
    file(CREATE_LINK ${fmt_headers_of_core}/fmt ${PROJECT_BINARY_DIR}/fmt_first/fmt SYMBOLIC)
    target_include_directories(lacuna_torch SYSTEM INTERFACE ${PROJECT_BINARY_DIR}/fmt_first ${LACUNA_TORCH}/include
                               ${LACUNA_TORCH}/include/torch/csrc/api/include)
    # The shared C++ library comes first: a PyTorch's libtorch.so exports parts of std::filesystem of its own that do not work outside it, and
    # a compiler that would link its own static one would give PyTorch's streams the locales of another library.
    target_link_libraries(lacuna_torch INTERFACE -l:libstdc++.so.6)
    # libtorch_cuda registers the CUDA operators when it is loaded; nothing refers to it by name.
    target_link_options(lacuna_torch INTERFACE -Wl,-rpath,${LACUNA_TORCH}/lib -Wl,--no-as-needed
                        -Wl,--allow-shlib-undefined)  # of libraries that PyTorch finds at run time
    foreach(library torch torch_cpu torch_cuda c10 c10_cuda)
      if(EXISTS ${LACUNA_TORCH}/lib/lib${library}.so)
        target_link_libraries(lacuna_torch INTERFACE ${LACUNA_TORCH}/lib/lib${library}.so)
      endif()
    endforeach()
    set(LACUNA_COMPRESS_FOUND ON)
  else()
    find_package(Torch QUIET)
    if(Torch_FOUND)
      target_include_directories(lacuna_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
      target_link_libraries(lacuna_torch INTERFACE ${TORCH_LIBRARIES})
      separate_arguments(torch_flags UNIX_COMMAND "${TORCH_CXX_FLAGS}")
      target_compile_options(lacuna_torch INTERFACE ${torch_flags})
      set(LACUNA_COMPRESS_FOUND ON)
    endif()
  endif()
  if(compress_wanted STREQUAL "ON" AND NOT LACUNA_COMPRESS_FOUND)
    message(FATAL_ERROR "LACUNA_COMPRESS is ON, but LibTorch is not found; install libtorch-dev, or set LACUNA_TORCH to a PyTorch's torch folder")
  endif()
endif()
message(STATUS "Compressor: ${LACUNA_COMPRESS_FOUND}")
